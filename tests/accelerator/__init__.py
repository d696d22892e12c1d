"""A simulated accelerator, torch's PrivateUse1 device `sim`: four devices, built by the compiler of this machine."""

"""Times loads of one checkpoint on this machine, beside floors that say how fast a load could be. Without Ray."""

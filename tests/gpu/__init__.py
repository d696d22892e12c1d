"""What only real GPUs can show; on the simulated device the same checks show that they are sound."""

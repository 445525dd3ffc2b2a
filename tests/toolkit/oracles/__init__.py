"""What is right, said another way: dense attention, EAGLE heads from their tensors alone, distributions by enumeration."""

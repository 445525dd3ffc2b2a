"""What happens to kernels before they are launched for the first time."""

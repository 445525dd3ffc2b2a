"""What is known of kernels before they are launched, and what happens to them before they are for the first time."""

"""Products with stacks of matrices, such as experts'."""

"""The model implementation that runs the model code of the transformers library with specdec's attention in it."""

"""Random layers and texts for tests of recurrent layers."""

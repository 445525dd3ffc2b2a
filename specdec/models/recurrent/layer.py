"""What marks a module as a recurrent layer for whoever looks through a model's layers."""

from __future__ import annotations

from torch import nn


class RecurrentLayer(nn.Module):
    """Stands where another layer has attention, and keeps a state by row in place of keys."""

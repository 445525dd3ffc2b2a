"""Replicas of one decoder behind Ray Serve.  Needs the extra `ray`, which is imported only when `application` is called."""

from __future__ import annotations

from specdec.serve.replicas.application import application

__all__ = ["application"]

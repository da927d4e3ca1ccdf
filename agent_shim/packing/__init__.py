"""Makes what a pod takes: one file for images with Python, a bundle for images without."""

from __future__ import annotations

"""Paths of the checkout and its data."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""
SHARED_DATA = ROOT.parent / "shared" / "data"
"""Data sets that may be next to the checkout."""

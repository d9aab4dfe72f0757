"""Adapters to device families."""

"""The version, in one place; hatch reads it when it builds."""

__version__ = "0.1.0"

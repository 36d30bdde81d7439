"""Shapes change rewards or advantages. Each method is a file here."""

"""Turns lesson files into website pages and Colab notebooks, and holds them to a contract."""

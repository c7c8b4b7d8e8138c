"""Durable AI-agent tasks out of PostgreSQL. What is named here is the public surface; all of it is loaded lazily."""

__version__ = "0.1.0"

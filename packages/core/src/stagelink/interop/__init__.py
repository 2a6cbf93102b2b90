"""Stagelink behind the interfaces of others."""

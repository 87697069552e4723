"""tests/models"""

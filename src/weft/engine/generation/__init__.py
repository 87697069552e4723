"""engine/generation"""

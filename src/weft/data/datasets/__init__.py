"""data/datasets"""

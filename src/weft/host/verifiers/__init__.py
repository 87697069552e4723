"""host/verifiers"""

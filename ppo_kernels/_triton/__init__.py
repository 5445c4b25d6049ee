"""Triton implementations of the operators; the only folder that imports triton."""

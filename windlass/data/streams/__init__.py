"""Streaming: documents arrive in parts, and a run trains on one while the next is made."""

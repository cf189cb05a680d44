"""Numbers of quantisers on the host, in NumPy: tables, scales, k-means. No adapter is here."""

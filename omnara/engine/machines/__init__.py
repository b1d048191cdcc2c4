"""Use cases of machines: who may use them, what runs on them, and how that ends."""

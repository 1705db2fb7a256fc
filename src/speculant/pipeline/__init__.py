"""The whole of `speculant train`: requests, answers, features, training, selection, the head."""

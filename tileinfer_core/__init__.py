"""The engine of TileInfer: models on disk, weights, tokens, backends, decoding. See docs/architecture.md."""

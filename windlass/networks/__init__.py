"""Networks of layers that families share: what lies between a layer and a model."""

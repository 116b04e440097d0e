"""`Seen`: what a model is made of."""

import dataclasses
from collections import Counter

from jaxfp8.conversion._layer import Layer


class Seen:
    """The modules and layers of a model, in the order in which they were seen.

    Attributes:
      modules: the type of each module, by path.
      layers: the layers, by path.
      caller: the path of the module whose call runs now.
      kernels: by path, the names of parameters that no known method multiplied.
      vocabularies: the numbers of rows of its embeddings.
      flops: operations by path of a layer; see `flops_of`.
      in_loops: paths of layers that a loop runs more than once.
      shared_scopes: paths whose kernels belong to layers with longer paths (`nn.share_scope`).

    Example:
      >>> seen = Seen()
      >>> seen.add(Layer(path="up", type=dict))
      >>> seen.add(Layer(path="up", type=dict))
      >>> seen.layers["up"].calls
      2
    """

    def __init__(self) -> None:
        self.modules: dict[str, type] = {}
        self.layers: dict[str, Layer] = {}
        self.caller = ""
        self.kernels: dict[str, frozenset[str]] = {}
        self.vocabularies: set[int] = set()
        self.flops: Counter[str] = Counter()
        self.in_loops: frozenset[str] = frozenset()
        self.shared_scopes: set[str] = set()

    def add(self, layer: Layer) -> None:
        """Note a call of a layer."""
        known = self.layers.get(layer.path)
        if known is None:
            self.layers[layer.path] = layer
        else:
            # An embedding that is looked up, and then used as a head, counts as the head.
            kept = layer if layer.shape else known
            self.layers[layer.path] = dataclasses.replace(kept, calls=known.calls + 1)

"""Stand-in for the fusible operations: names in Megatron's annotations, never built."""


class FusibleOperation: ...


class Sequential: ...

"""A language model of a few numbers: a recurrent state, so that a cache, padding and packing are plain to get right."""

import torch
from unirl.core.specs.spec import ModelSpec
from unirl.numerics.tokens.log_probs import token_log_probs

VOCABULARY, WIDTH = 11, 6


class TinyTextModel:
    """A `unirl.core.roles.TextModel`. Token 0 ends a text; a token is a letter, `a` for 1."""

    stop_tokens, pad_token, packs = (0,), 9, True
    spec = ModelSpec(name="letters", summary="", build="", config="", tracks={"text": "text"}, trainable="")

    def __init__(self, *, dtype=torch.float64, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape):
            return (0.5 * torch.randn(*shape, generator=generator, dtype=dtype)).requires_grad_()

        self.device = torch.device("cpu")
        self.embedding, self.mixing, self.head = drawn(VOCABULARY, WIDTH), drawn(WIDTH, WIDTH), drawn(VOCABULARY, WIDTH)
        with torch.no_grad():
            self.head[0] = 0.5  # so that texts end
        self.num_forwards = 0

    def prompt_tokens(self, inputs, *, sampling):
        return [torch.tensor([ord(letter) - 96 for letter in prompt]) for prompt in inputs.texts]

    def texts(self, tokens):
        return ["".join(chr(96 + int(token)) for token in row if token) for row in tokens]

    def states(self, tokens, positions, mask, start):
        """[B, L, WIDTH]: padding leaves the state, position 0 begins with none."""
        self.num_forwards += 1
        state, result = start, []
        for place in range(tokens.shape[1]):
            before = torch.where((positions[:, place] == 0)[:, None], torch.zeros_like(state), state)
            after = torch.tanh(before @ self.mixing + self.embedding[tokens[:, place]])
            state = torch.where(mask[:, place, None], after, state)
            result.append(state)
        return torch.stack(result, dim=1)

    def score(self, batch, *, temperature, with_entropy=False):
        rows = batch.tokens.shape[0]
        mask = torch.ones_like(batch.tokens, dtype=torch.bool) if batch.attention_mask is None else batch.attention_mask
        states = self.states(batch.tokens, batch.positions, mask, self.embedding.new_zeros(rows, WIDTH))
        hidden = states.flatten(0, 1)[batch.target_index]
        settings = {"temperature": temperature, "with_entropy": with_entropy, "allowed": batch.allowed}
        return token_log_probs(hidden, self.head, batch.targets, **settings)

    def next_logits(self, tokens, *, positions, attention_mask, cache):
        start = self.embedding.new_zeros(tokens.shape[0], WIDTH) if cache is None else cache
        state = self.states(tokens, positions, attention_mask[:, -tokens.shape[1] :], start)[:, -1]
        return (state @ self.head.T).float(), state

    def select_cache(self, cache, rows):
        return cache[rows]

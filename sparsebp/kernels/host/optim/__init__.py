"""Update rules of optimizers, of many parameters at once and behind a product."""

"""From a personal model to a sealed bundle: inputs, conversion, choice among variants, proof."""

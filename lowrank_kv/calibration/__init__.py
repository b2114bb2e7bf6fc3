"""Second moments of a model's states and of its loss's gradients on a text: taking, saving and loading them."""

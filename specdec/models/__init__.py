"""Target models: their configs, their layers (which draft heads use too), and the strict checkpoint readers that fill them."""

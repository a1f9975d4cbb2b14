"""A small Flower app whose strategy is HeurFedAMP."""

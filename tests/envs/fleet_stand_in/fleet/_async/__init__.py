"""The part of it that is used."""

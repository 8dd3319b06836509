"""Small helpers that several subpackages share. They know nothing of models, and nothing public is here."""

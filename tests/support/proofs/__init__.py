"""Which expensive tests a commit has proven already: keys of what they depend on, the record, what runs again."""

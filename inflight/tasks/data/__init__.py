"""The rows of a user's own data: read, put in order, and named by what they hold."""

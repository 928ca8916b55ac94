"""The other host's side of a starter: receives a parcel, runs its process while its lease lasts."""

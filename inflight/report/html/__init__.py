"""The report of a run as one HTML file that needs no network: data from a run folder, and the page that shows it."""

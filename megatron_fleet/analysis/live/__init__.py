"""Live page of a run: `follow` reads what it writes, `view` chooses what is shown, `server` answers the browser."""

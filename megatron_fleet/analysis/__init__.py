"""What a run did, read from the folder it left: intervals, error taxonomy, before and after, and one page of it all."""

"""Files on disk: folders for this user alone, cached results, dumps for debugging."""

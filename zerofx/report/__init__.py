"""Reports for people: schedules as tables, pages, pictures and traces."""

"""What is kept on disk: own folders, cached answers, dumps for who debugs a step."""

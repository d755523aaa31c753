"""Workers in processes of their own: started, watched, started again."""

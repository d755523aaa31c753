"""The Responses API: requests as chats, and answers as items and events."""

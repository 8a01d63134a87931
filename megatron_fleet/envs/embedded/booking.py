"""``booking``: meeting rooms."""

from __future__ import annotations

import random
from typing import ClassVar

from megatron_fleet.envs.embedded.world import PEOPLE, TEXT, ToolFailure, World, fresh_ids, one_of, table, tool

CITIES = ("Oslo", "Rome", "Paris", "Lima", "Cairo", "Delhi", "Seoul", "Quito")
KINDS = ("quiet", "garden", "studio", "lab", "hall", "lounge")
SEATS = (4, 6, 8, 12, 20)
SLOTS = ("morning", "noon", "evening")
TODAY = "2026-03-10"
DATES = tuple(f"2026-03-{day}" for day in range(11, 21))


class Booking(World):
    env_key = "booking"
    schema = """
    CREATE TABLE rooms(id TEXT PRIMARY KEY, city TEXT, kind TEXT, seats INTEGER);
    CREATE TABLE bookings(id TEXT PRIMARY KEY, room TEXT, date TEXT, slot TEXT, guest TEXT);
    """
    columns: ClassVar = {"rooms": "id, city, kind, seats", "bookings": "room, date, slot, guest"}

    def populate(self, rng: random.Random) -> list[str]:
        """Two cities of three rooms over three dates; the first resident has one booking on each date."""
        people = rng.sample(PEOPLE, 5)
        dates = rng.sample(DATES, 3)
        rooms = fresh_ids(rng, "R", 6)
        for city, members in zip(rng.sample(CITIES, 2), (rooms[:3], rooms[3:]), strict=True):
            for room, kind in zip(members, rng.sample(KINDS, 3), strict=True):
                self.db.execute("INSERT INTO rooms VALUES (?,?,?,?)", (room, city, kind, rng.choice(SEATS)))
        ids = iter(fresh_ids(rng, "B", 40))
        for date in dates:
            own = rng.choice(rooms)
            for room in rooms:
                taken = rng.sample(SLOTS, 2 if rng.random() < 0.6 else 1)
                guests = [people[0]] if room == own else []
                guests += rng.sample(people[1:], len(taken) - len(guests))
                for slot, guest in zip(taken, guests, strict=True):
                    self.db.execute("INSERT INTO bookings VALUES (?,?,?,?,?)", (next(ids), room, date, slot, guest))
        return people

    @tool("List the rooms of a city.", city=TEXT)
    def find_rooms(self, city: str) -> str:
        return table("kind seats id", self.query("SELECT kind, seats, id FROM rooms WHERE city = ?", city))

    @tool("Show who has a room on a date.", room=TEXT, date=TEXT)
    def room_slots(self, room: str, date: str) -> str:
        self.row("rooms", room, "room")
        guests = dict(self.query("SELECT slot, guest FROM bookings WHERE room = ? AND date = ?", room, date))
        return table("slot guest", [(slot, guests.get(slot, "free")) for slot in SLOTS])

    @tool("Book a room.", room=TEXT, date=TEXT, slot=one_of(*SLOTS))
    def book_room(self, room: str, date: str, slot: str) -> str:
        self.row("rooms", room, "room")
        if date not in DATES:
            raise ToolFailure(f"no bookings on {date[:10]}")
        taken = {row[0] for row in self.query("SELECT id FROM bookings")}
        if self.query("SELECT 1 FROM bookings WHERE room = ? AND date = ? AND slot = ?", room, date, slot):
            raise ToolFailure(f"{room} is taken {date} {slot}")
        id = next(f"B-{n}" for n in range(10, 1000) if f"B-{n}" not in taken)
        user = self.variables.get("LOGGED_IN_USER", "")
        self.db.execute("INSERT INTO bookings VALUES (?,?,?,?,?)", (id, room, date, slot, user))
        return f"booked {id}"

    @tool("List my bookings.")
    def my_bookings(self) -> str:
        user = self.variables.get("LOGGED_IN_USER", "")
        rows = self.query("SELECT date, slot, room, id FROM bookings WHERE guest = ? LIMIT 6", user)
        return table("date slot room id", rows)

    @tool("Cancel my booking.", id=TEXT)
    def cancel_booking(self, id: str) -> str:
        booking = self.row("bookings", id, "booking")
        if booking["guest"] != self.variables.get("LOGGED_IN_USER"):
            raise ToolFailure(f"{id} belongs to {booking['guest']}")
        self.db.execute("DELETE FROM bookings WHERE id = ?", (id,))
        return f"cancelled {id}"

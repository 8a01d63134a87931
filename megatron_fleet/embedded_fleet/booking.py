"""``booking``: meeting rooms."""

from __future__ import annotations

import random
from typing import ClassVar

from megatron_fleet.embedded_fleet.world import PEOPLE, TEXT, ToolFailure, World, fresh_ids, table, tool

CITIES = ("Oslo", "Rome", "Paris", "Lima", "Cairo", "Delhi", "Seoul", "Quito")
KINDS = ("quiet", "garden", "studio", "lab", "hall", "lounge")
SEATS = (4, 6, 8, 12, 20)
SLOTS = ("morning", "noon", "evening")
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday")


class Booking(World):
    env_key = "booking"
    schema = """
    CREATE TABLE rooms(id TEXT PRIMARY KEY, city TEXT, kind TEXT, seats INTEGER);
    CREATE TABLE bookings(id TEXT PRIMARY KEY, room TEXT, day TEXT, slot TEXT, guest TEXT);
    """
    columns: ClassVar = {"rooms": "id, city, kind, seats", "bookings": "room, day, slot, guest"}

    def populate(self, rng: random.Random) -> list[str]:
        """Two cities of three rooms over three days; the first resident has one booking on each day."""
        people = rng.sample(PEOPLE, 5)
        days = rng.sample(DAYS, 3)
        rooms = fresh_ids(rng, "R", 6)
        for city, members in zip(rng.sample(CITIES, 2), (rooms[:3], rooms[3:]), strict=True):
            for room, kind in zip(members, rng.sample(KINDS, 3), strict=True):
                self.db.execute("INSERT INTO rooms VALUES (?,?,?,?)", (room, city, kind, rng.choice(SEATS)))
        ids = fresh_ids(rng, "B", 42)
        own_ids, other_ids = iter(ids[:3]), iter(ids[3:])
        for day in days:
            own = rng.choice(rooms)
            for room in rooms:
                taken = rng.sample(SLOTS, 2 if rng.random() < 0.6 else 1)
                guests = [people[0]] if room == own else []
                guests += rng.sample(people[1:], len(taken) - len(guests))
                for slot, guest in zip(taken, guests, strict=True):
                    id = next(own_ids if guest == people[0] else other_ids)
                    self.db.execute("INSERT INTO bookings VALUES (?,?,?,?,?)", (id, room, day, slot, guest))
        return people

    @tool("List the rooms of a city.", city=TEXT)
    def find_rooms(self, city: str) -> str:
        return table("kind id seats", self.query("SELECT kind, id, seats FROM rooms WHERE city = ?", city))

    @tool("Show who has a room on a day.", room=TEXT, day=TEXT)
    def room_slots(self, room: str, day: str) -> str:
        self.row("rooms", room, "room")
        guests = dict(self.query("SELECT slot, guest FROM bookings WHERE room = ? AND day = ?", room, day))
        return table("slot guest", [(slot, guests.get(slot, "free")) for slot in SLOTS])

    @tool("Book a room.", room=TEXT, day=TEXT, slot=TEXT)
    def book_room(self, room: str, day: str, slot: str) -> str:
        self.row("rooms", room, "room")
        if day not in DAYS:
            raise ToolFailure(f"no bookings on {day[:10]}")
        if slot not in SLOTS:
            raise ToolFailure(f"no slot {slot[:10]}")
        taken = {row[0] for row in self.query("SELECT id FROM bookings")}
        if self.query("SELECT 1 FROM bookings WHERE room = ? AND day = ? AND slot = ?", room, day, slot):
            raise ToolFailure(f"{room} is taken {day} {slot}")
        id = next(name for n in range(10, 1000) if (name := f"B{n}") not in taken)
        user = self.variables.get("LOGGED_IN_USER", "")
        self.db.execute("INSERT INTO bookings VALUES (?,?,?,?,?)", (id, room, day, slot, user))
        return f"booked {id}"

    @tool("List my bookings.")
    def my_bookings(self) -> str:
        user = self.variables.get("LOGGED_IN_USER", "")
        rows = self.query("SELECT day, id, room, slot FROM bookings WHERE guest = ? LIMIT 6", user)
        return table("day id room slot", rows)

    @tool("Cancel my booking.", id=TEXT)
    def cancel_booking(self, id: str) -> str:
        booking = self.row("bookings", id, "booking")
        if booking["guest"] != self.variables.get("LOGGED_IN_USER"):
            raise ToolFailure(f"{id} belongs to {booking['guest']}")
        self.db.execute("DELETE FROM bookings WHERE id = ?", (id,))
        return f"cancelled {id}"

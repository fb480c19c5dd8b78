//! Choice of the connection for a call: all connections that are ready, in turn.

use std::collections::BTreeMap;
use std::net::SocketAddr;

/// State of the connection to one address.
pub enum State<C> {
    /// The connection is being opened, or has just ended.
    Connecting,
    /// The connection accepts calls.
    Ready(C),
    /// Reason why the connection accepts no calls. The state remains until a later attempt succeeds.
    Failed(String),
}

/// All addresses of the name.
pub struct Addresses<C> {
    pub states: BTreeMap<SocketAddr, State<C>>,
    /// Reason why the name could not be resolved, if it could not.
    pub unknown: Option<String>,
}

/// What a call must do next.
#[derive(Debug, PartialEq)]
pub enum Choice<C> {
    Take(C),
    Wait,
    Fail(String),
}

impl<C> Default for Addresses<C> {
    fn default() -> Self {
        Self { states: BTreeMap::new(), unknown: None }
    }
}

impl<C: Clone> Addresses<C> {
    /// Returns the choice for the `turn`th call.
    pub fn choose(&self, turn: usize) -> Choice<C> {
        let mut ready = Vec::new();
        let mut waits = self.unknown.is_none() && self.states.is_empty();
        let mut failed = self.unknown.as_deref();
        for state in self.states.values() {
            match state {
                State::Ready(connection) => ready.push(connection),
                State::Connecting => waits = true,
                State::Failed(why) => failed = Some(why),
            }
        }
        match (ready.is_empty(), waits) {
            (false, _) => Choice::Take(ready[turn % ready.len()].clone()),
            (true, true) => Choice::Wait,
            (true, false) => Choice::Fail(failed.unwrap_or("no address").to_owned()),
        }
    }

    /// Sets the state of `address`, if the name still has this address.
    pub fn set(&mut self, address: SocketAddr, state: State<C>) {
        if let Some(known) = self.states.get_mut(&address) {
            *known = state;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(states: Vec<State<&'static str>>) -> Addresses<&'static str> {
        let addresses = (1..).map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        Addresses { states: addresses.zip(states).collect(), unknown: None }
    }

    fn failed(why: &str) -> State<&'static str> {
        State::Failed(why.into())
    }

    #[test]
    fn ready_ones_are_taken_in_turn() {
        let three = addresses(vec![
            State::Ready("a"),
            State::Connecting,
            State::Ready("b"),
            failed("refused"),
            State::Ready("c"),
        ]);
        let taken: Vec<_> = (0..6).map(|turn| three.choose(turn)).collect();
        assert_eq!(taken, ["a", "b", "c", "a", "b", "c"].map(Choice::Take));
    }

    #[test]
    fn calls_wait_while_one_may_become_ready() {
        assert_eq!(addresses(vec![]).choose(0), Choice::Wait);
        assert_eq!(addresses(vec![State::Connecting, failed("refused")]).choose(0), Choice::Wait);
    }

    #[test]
    fn calls_fail_once_all_have_failed() {
        assert_eq!(addresses(vec![failed("refused")]).choose(0), Choice::Fail("refused".into()));
        let unknown = Addresses { unknown: Some("no such name".into()), ..addresses(vec![]) };
        assert_eq!(unknown.choose(0), Choice::Fail("no such name".into()));
    }

    #[test]
    fn what_the_name_has_no_more_stays_away() {
        let mut none = addresses(vec![]);
        none.set(SocketAddr::from(([127, 0, 0, 1], 1)), State::Ready("late"));
        assert_eq!(none.choose(0), Choice::Wait);
    }
}

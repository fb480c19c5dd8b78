//! Keeps a connection to each address that the name has.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

use super::balance::{Addresses, State};
use super::connection::Connection;
use super::health::Dialer;

/// Publishes the states of its connections through a `watch`. When the keeper is dropped, its connections end.
pub struct Keeper {
    pub dialer: Dialer,
    addresses: Arc<watch::Sender<Addresses<Connection>>>,
    tasks: JoinSet<()>,
    kept: BTreeMap<SocketAddr, AbortHandle>,
}

impl Keeper {
    pub fn new(dialer: Dialer, addresses: watch::Sender<Addresses<Connection>>) -> Self {
        Self { dialer, addresses: Arc::new(addresses), tasks: JoinSet::new(), kept: BTreeMap::new() }
    }

    /// Applies the result of resolving the name. Calls that run on a removed address continue there.
    pub fn update(&mut self, found: Result<BTreeSet<SocketAddr>, String>) {
        let found = match found {
            Ok(found) => found,
            // The addresses that were found before may still be valid.
            Err(why) => return self.addresses.send_modify(|known| known.unknown = Some(why)),
        };
        self.addresses.send_modify(|known| {
            known.unknown = None;
            known.states.retain(|address, _| found.contains(address));
            for address in &found {
                known.states.entry(*address).or_insert(State::Connecting);
            }
        });
        self.kept.retain(|address, task| {
            let stays = found.contains(address);
            if !stays {
                task.abort();
            }
            stays
        });
        while self.tasks.try_join_next().is_some() {} // tasks that have been aborted
        for address in found {
            self.kept.entry(address).or_insert_with(|| {
                let addresses = self.addresses.clone();
                let tell = move |state| addresses.send_modify(|known| known.set(address, state));
                self.tasks.spawn(self.dialer.clone().keep(address, tell))
            });
        }
    }
}

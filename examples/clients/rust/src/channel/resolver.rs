//! Repeated resolution of a name to its addresses.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use http::uri::Authority;
use tokio::net::lookup_host;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

/// Interval between two regular resolutions of the name. There is no notification when a name has new addresses.
const INTERVAL: Duration = Duration::from_secs(5);
/// Minimum time between two resolutions.
const PAUSE: Duration = Duration::from_millis(500);

/// Address of the form `HOST:PORT` or `dns:///HOST:PORT`. Both forms have the same meaning.
#[derive(Clone, Debug, PartialEq)]
pub struct Target(Authority);

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let authority = text.strip_prefix("dns:///").unwrap_or(text).parse::<Authority>();
        let named = |authority: &Authority| authority.port_u16().is_some() && !authority.host().is_empty();
        match authority {
            Ok(authority) if named(&authority) && !authority.as_str().contains('@') => Ok(Self(authority)),
            _ => Err("it must be HOST:PORT or dns:///HOST:PORT".into()),
        }
    }
}

impl Target {
    /// Returns the address as `HOST:PORT`.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    async fn lookup(&self) -> Result<BTreeSet<SocketAddr>, String> {
        let found = lookup_host(self.as_str()).await.map_err(|error| format!("{}: {error}", self.as_str()))?;
        Ok(found.collect())
    }
}

/// Resolves the name now, every few seconds, and whenever `wanted` is notified. Never ends.
pub async fn follow(target: &Target, wanted: &Notify, mut tell: impl FnMut(Result<BTreeSet<SocketAddr>, String>)) {
    loop {
        tell(target.lookup().await);
        sleep(PAUSE).await;
        // Resolve again after a notification and after the interval alike.
        let _ = timeout(INTERVAL, wanted.notified()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_has_a_host_and_a_port() {
        for text in ["localhost:50051", "dns:///localhost:50051"] {
            assert_eq!(text.parse::<Target>().unwrap().as_str(), "localhost:50051");
        }
        assert_eq!("[::1]:50051".parse::<Target>().unwrap().as_str(), "[::1]:50051");
        for text in ["", "localhost", ":50051", "localhost:", "localhost:99999", "http://localhost:1", "me@localhost:1"]
        {
            assert!(text.parse::<Target>().is_err(), "{text}");
        }
    }

    #[tokio::test]
    async fn a_name_is_looked_up_again_when_that_is_wanted() {
        let (target, wanted) = ("localhost:1".parse().unwrap(), Notify::new());
        let (sender, mut told) = tokio::sync::mpsc::unbounded_channel();
        let following = follow(&target, &wanted, |found| sender.send(found).expect("the test listens"));
        let asking = async {
            for _ in 0..2 {
                let found = told.recv().await.unwrap().unwrap();
                assert!(found.iter().all(|address| address.ip().is_loopback() && address.port() == 1));
                wanted.notify_one();
            }
        };
        tokio::select! { () = following => unreachable!(), () = asking => {} }
    }
}

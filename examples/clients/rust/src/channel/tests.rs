//! Tests of the channel with real servers on the loopback interface.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use penstock_protos::SERVICE_CONFIG;
use penstock_protos::inference::v1::generate_request::Prompt;
use penstock_protos::inference::v1::inference_service_client::InferenceServiceClient;
use penstock_protos::inference::v1::inference_service_server::{InferenceService, InferenceServiceServer};
use penstock_protos::inference::v1::{GenerateRequest, GenerateResponse};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::codegen::BoxStream;
use tonic::transport::Server;
use tonic_health::ServingStatus;
use tonic_health::server::{HealthReporter, health_reporter};

use super::balance::State;
use super::*;

/// Returns the words of a prompt. The first `fails` calls fail before a word. The word `gone` fails, and `hold` waits.
#[derive(Clone, Default)]
struct Fake {
    calls: Arc<AtomicU32>,
    fails: Arc<AtomicU32>,
    attempts: Arc<Mutex<Vec<String>>>,
}

#[tonic::async_trait]
impl InferenceService for Fake {
    async fn generate(
        &self,
        request: tonic::Request<GenerateRequest>,
    ) -> Result<tonic::Response<BoxStream<GenerateResponse>>, Status> {
        self.calls.fetch_add(1, SeqCst);
        let attempt = request.metadata().get("grpc-previous-rpc-attempts").map_or("", |text| text.to_str().unwrap());
        self.attempts.lock().unwrap().push(attempt.to_owned());
        if self.fails.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok() {
            return Err(Status::unavailable("not now"));
        }
        let (sender, receiver) = mpsc::channel(1);
        let Some(Prompt::Text(prompt)) = request.into_inner().prompt else { panic!("a text was expected") };
        tokio::spawn(async move {
            for word in prompt.split(' ') {
                let said = match word {
                    "gone" => Err(Status::unavailable("the engine went away")),
                    _ => Ok(GenerateResponse { text: word.into(), ..Default::default() }),
                };
                if word == "hold" || sender.send(said).await.is_err() {
                    return sender.closed().await;
                }
            }
        });
        Ok(tonic::Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// Server that runs a `Fake`.
struct Frontend {
    fake: Fake,
    address: SocketAddr,
    health: HealthReporter,
    leave: oneshot::Sender<()>,
}

impl Frontend {
    async fn start() -> Self {
        Self::serve(Server::builder(), true).await
    }

    async fn serve(mut server: Server, tells_health: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (fake, address) = (Fake::default(), listener.local_addr().unwrap());
        let (health, service) = health_reporter();
        let (leave, leaving) = oneshot::channel::<()>();
        let router = server
            .add_service(InferenceServiceServer::new(fake.clone()))
            .add_optional_service(tells_health.then_some(service));
        let incoming = TcpListenerStream::new(listener);
        tokio::spawn(router.serve_with_incoming_shutdown(incoming, async { drop(leaving.await) }));
        Self { fake, address, health, leave }
    }

    fn calls(&self) -> u32 {
        self.fake.calls.load(SeqCst)
    }

    /// Sets the health, and waits until the channel has received it.
    async fn set_health(&self, status: ServingStatus, client: &Client) {
        self.health.set_service_status("", status).await;
        client
            .until(|known| matches!(known[&self.address], State::Ready(_)) == (status == ServingStatus::Serving))
            .await;
    }
}

/// Client with a channel whose addresses the test sets.
struct Client {
    stub: InferenceServiceClient<Channel>,
    channel: Channel,
    name: mpsc::UnboundedSender<BTreeSet<SocketAddr>>,
}

impl Client {
    /// Returns a client that is connected to all these servers.
    async fn of(frontends: &[&Frontend]) -> Self {
        let client = Self::new();
        client.rename(frontends).await;
        client
    }

    fn new() -> Self {
        let (name, mut told) = mpsc::unbounded_channel();
        let endpoint = Endpoint::from_static("http://frontends.test:1");
        let config = ServiceConfig::parse(SERVICE_CONFIG).unwrap();
        let channel = Channel::over(endpoint, config, |mut keeper| async move {
            while let Some(found) = told.recv().await {
                keeper.update(Ok(found));
            }
        });
        Self { stub: InferenceServiceClient::new(channel.clone()), channel, name }
    }

    async fn rename(&self, frontends: &[&Frontend]) {
        let addresses: BTreeSet<_> = frontends.iter().map(|frontend| frontend.address).collect();
        self.name.send(addresses.clone()).unwrap();
        self.until(|known| known.keys().eq(&addresses) && known.values().all(|state| matches!(state, State::Ready(_))))
            .await;
    }

    async fn until(&self, holds: impl Fn(&BTreeMap<SocketAddr, State<Connection>>) -> bool) {
        self.channel.0.addresses.clone().wait_for(|known| holds(&known.states)).await.unwrap();
    }

    /// Returns the received words, and the result of the call.
    async fn ask(&self, prompt: &str) -> (String, Result<(), Status>) {
        let mut words = Vec::new();
        let ended = self.hear(request(prompt), &mut words).await;
        (words.join(" "), ended)
    }

    async fn hear(&self, request: tonic::Request<GenerateRequest>, words: &mut Vec<String>) -> Result<(), Status> {
        let mut stream = self.stub.clone().generate(request).await?.into_inner();
        while let Some(response) = stream.message().await? {
            words.push(response.text);
        }
        Ok(())
    }

    async fn succeed(&self, calls: u32) {
        for _ in 0..calls {
            let (text, ended) = self.ask("the ferry").await;
            assert!(ended.is_ok(), "{ended:?}");
            assert_eq!(text, "the ferry");
        }
    }
}

fn request(prompt: &str) -> tonic::Request<GenerateRequest> {
    let prompt = Some(Prompt::Text(prompt.into()));
    tonic::Request::new(GenerateRequest { prompt, ..Default::default() })
}

fn code(ended: Result<(), Status>) -> Code {
    ended.map_or_else(|status| status.code(), |()| Code::Ok)
}

#[tokio::test]
async fn calls_go_to_all_in_turn() {
    let (one, two) = (Frontend::start().await, Frontend::start().await);
    Client::of(&[&one, &two]).await.succeed(6).await;
    assert_eq!((one.calls(), two.calls()), (3, 3));
}

#[tokio::test]
async fn one_that_is_not_healthy_gets_no_calls_until_it_is() {
    let (one, two) = (Frontend::start().await, Frontend::start().await);
    let client = Client::of(&[&one, &two]).await;
    two.set_health(ServingStatus::NotServing, &client).await;
    client.succeed(4).await;
    assert_eq!((one.calls(), two.calls()), (4, 0));
    two.set_health(ServingStatus::Serving, &client).await;
    client.succeed(4).await;
    assert_eq!((one.calls(), two.calls()), (6, 2));
}

#[tokio::test]
async fn one_that_knows_nothing_of_health_is_healthy() {
    let one = Frontend::serve(Server::builder(), false).await;
    Client::of(&[&one]).await.succeed(2).await;
}

#[tokio::test]
async fn a_call_that_failed_before_its_answer_is_tried_again_elsewhere() {
    let (one, two) = (Frontend::start().await, Frontend::start().await);
    one.fake.fails.store(9, SeqCst);
    let client = Client::of(&[&one, &two]).await;
    client.succeed(4).await;
    assert_eq!(two.calls(), 4);
    let second = two.fake.attempts.lock().unwrap().iter().filter(|attempt| *attempt == "1").count();
    assert!(second > 0 && second == one.calls() as usize, "{second} second attempts");
}

#[tokio::test]
async fn a_call_is_tried_as_often_as_the_service_config_says() {
    let one = Frontend::start().await;
    one.fake.fails.store(u32::MAX, SeqCst);
    let client = Client::of(&[&one]).await;
    assert_eq!(code(client.ask("the ferry").await.1), Code::Unavailable);
    let policy = client.channel.0.config.retry_policy("/penstock.inference.v1.InferenceService/Generate").unwrap();
    assert_eq!(one.calls(), policy.max_attempts);
}

#[tokio::test]
async fn a_call_that_failed_behind_its_first_message_is_not_tried_again() {
    let one = Frontend::start().await;
    let (text, ended) = Client::of(&[&one]).await.ask("the gone ferry").await;
    assert_eq!((text.as_str(), code(ended)), ("the", Code::Unavailable));
    assert_eq!(one.calls(), 1);
}

#[tokio::test]
async fn a_deadline_ends_a_stream_that_has_begun() {
    let one = Frontend::start().await;
    let (mut words, mut asked) = (Vec::new(), request("the ferry hold"));
    asked.set_timeout(Duration::from_secs(2));
    let ended = Client::of(&[&one]).await.hear(asked, &mut words).await;
    assert_eq!(words, ["the", "ferry"]);
    assert_eq!(ended.unwrap_err().message(), "the deadline of 2 s has passed");
}

#[tokio::test]
async fn a_deadline_ends_a_call_that_has_no_connection() {
    let mut asked = request("the ferry");
    asked.set_timeout(Duration::from_millis(50));
    assert_eq!(code(Client::new().hear(asked, &mut Vec::new()).await), Code::DeadlineExceeded);
}

#[tokio::test]
async fn no_call_fails_while_servers_end_their_connections() {
    let moves = || Server::builder().max_connection_age(Duration::from_millis(50));
    let (one, two) = (Frontend::serve(moves(), true).await, Frontend::serve(moves(), true).await);
    let client = Client::of(&[&one, &two]).await;
    for _ in 0..10 {
        client.succeed(10).await;
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn no_call_fails_when_a_server_leaves() {
    let (one, two) = (Frontend::start().await, Frontend::start().await);
    let client = Client::of(&[&one, &two]).await;
    client.succeed(2).await;
    two.leave.send(()).unwrap();
    client.succeed(20).await;
    client.until(|known| matches!(known[&two.address], State::Failed(_))).await;
    client.succeed(2).await;
}

#[tokio::test]
async fn a_call_stays_where_it_is_when_its_address_has_gone_from_the_name() {
    let (one, two) = (Frontend::start().await, Frontend::start().await);
    let client = Client::of(&[&one]).await;
    let mut stream =
        client.stub.clone().generate(request("the ferry leaves at noon today")).await.unwrap().into_inner();
    client.rename(&[&two]).await;
    client.succeed(3).await;
    assert_eq!((one.calls(), two.calls()), (1, 3));
    let mut words = 0;
    while stream.message().await.unwrap().is_some() {
        words += 1;
    }
    assert_eq!(words, 6);
}

#[tokio::test]
async fn where_no_address_answers_the_call_says_why() {
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let client = Client::new();
    client.name.send(BTreeSet::from([gone])).unwrap();
    let status = client.ask("the ferry").await.1.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().starts_with(&format!("{gone}: ")), "{status}");
}
